"""Front ends: what turns a model that someone already has into a `Graph`."""
