"""The site: the documents, and a reference made from the code. ``make docs`` builds it; it is no part of the wheel."""
