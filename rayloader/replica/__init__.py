"""How the workers get the dataset."""
