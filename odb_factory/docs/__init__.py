"""Pages for users, and what writes the generated parts of them."""
