"""Results for people to look at. Nothing here computes anything new."""
