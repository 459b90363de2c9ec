"""Plan, prove and predict collectives as schedules; pure Python and numpy, works without the compiled core."""
