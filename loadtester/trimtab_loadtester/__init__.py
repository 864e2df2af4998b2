"""Load tester: open-loop load with known answers, and a record of every request."""
