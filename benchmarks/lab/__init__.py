"""Small real trainings, and faults to plant in them: for `fastguard demo --fault` and for the fault suite."""
