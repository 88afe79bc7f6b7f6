"""What peers say to each other, and how it is checked; knows no model and no optimizer."""
