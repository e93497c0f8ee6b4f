"""Which tensor elements are a unit's: the plan, how it is found, and how it is proved."""
