"""One self-contained HTML page of what commands wrote: folders are recognised, turned into data, and put into a page."""
