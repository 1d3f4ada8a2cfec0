"""The evidence: placers on the papers' testbeds, cell by cell, and the tables made of them."""
