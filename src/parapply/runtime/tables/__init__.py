"""How each announced table is applied, and from where on."""
