"""Who acts, and what a turn is made of. No I/O, no clock, no entropy: they come as arguments."""
