"""What the units are worth: utilities, and their running averages."""
