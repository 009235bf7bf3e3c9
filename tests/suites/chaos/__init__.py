"""Suite in which servers die, freeze and lose connections during answers; each must stay right or end with an error."""
