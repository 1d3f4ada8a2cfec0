"""Running plans on real devices, and finding out what ops and links cost there: one a file."""
