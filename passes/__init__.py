"""Graph passes: a program in, a program out."""
