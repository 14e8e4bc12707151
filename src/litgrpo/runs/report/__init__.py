"""Write a run as a self-contained HTML page, without scripts.

`run_files.read_run_files` reads a run folder in any state; `page.render_page` returns the HTML. The
same folder gives the same bytes: the page has no time, no path of the machine, no random number.
"""
