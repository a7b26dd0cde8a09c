"""What runs a parallel program: transitions as collectives, simulated ranks, DTensor parameters, start-up checks."""
