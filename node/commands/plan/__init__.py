"""`murmur plan`: predict the share of the peers' compute that a run can use."""
