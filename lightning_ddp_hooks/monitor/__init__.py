"""What communication costs: recorded, shown, predicted."""
