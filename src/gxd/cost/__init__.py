"""What it costs to lose a unit, measured."""
