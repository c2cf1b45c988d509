"""What device signals mean: causes as data, verdicts from reports and history, the look before a lease."""
