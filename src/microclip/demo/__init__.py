"""The demo: digits with wrong labels, trained plainly and with micro-batch clipping.

Data flows one way: `config` -> `plan` (which runs) -> `experiment` (`data`, `train`, in several
processes, kept by `cache`) -> `summary` (statistics) -> `tables`, `pictures`; and `folders` (run
folders, as `microclip report` reads them) -> `page` (`figures`). `show` ties the rooms together.
"""
