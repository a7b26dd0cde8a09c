"""What a plan costs: hardware profiles, compute, communication, memory, time."""
