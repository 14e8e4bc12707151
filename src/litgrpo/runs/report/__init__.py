"""Write a run as a self-contained HTML page, without scripts.

`page.render_page` returns the HTML of a `Run` in any state. The same folder gives the same bytes:
the page has no time, no path of the machine, no random number.
"""
