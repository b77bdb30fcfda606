"""Damaged and hostile model files, against everything that reads them."""
