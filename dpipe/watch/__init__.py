"""A run as it goes, on a page of its own: read from the files of the run, which notices nothing.

    metrics.jsonl  config.json  trace/  logs/  journal.sqlite      or a coordinator's answers
            '------------ RunFolder ------------'                   CoordinatedRun
                              |  Picture and points                       |
                              '------------- Broadcast -------------------'
                                  |               |              |
                               the page       a terminal     a report

picture.py       what is shown of a run, as plain values
tail.py          lines that are appended to a file, read once each
points.py        rows of metrics as points of the charts
network_map.py   who holds which layers, the links between them, and what binds
lanes.py         the last traced step by rank, with the predicted step beneath
folder.py        the picture of a run's folder, read again where its files change
coordinated.py   the picture of a run whose coordinator answers
broadcast.py     one reader for all who watch, and what each of them has not seen yet
assets.py        the files of the page
server.py        the page over HTTP: who may see it, and its events
terminal.py      the same picture in a terminal
report.py        the same page as one file, and several runs side by side
command.py       what `dpipe watch` does

The page itself is in the folder page: HTML, CSS, JavaScript, and uPlot with its licence.

To add a figure: a field of `Picture`, what fills it in folder.py, and an element of the page with
`data-figure` and its name.
"""
