"""Load tester: open-loop load with labelled payloads, and a record of every request."""
