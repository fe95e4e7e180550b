"""Examples of the documentation: blocks of its pages (`pages`), and how a page is run (`run`)."""
