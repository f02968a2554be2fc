"""Reviews: verdicts on examples (keep, relabel, drop), as the report page exports them.

`read` checks a file, `result` turns it into lists of ids and labels, or into a cleaned data set.
"""

from microclip.review.read import read_review
from microclip.review.result import Review, ReviewedDataset

__all__ = ["Review", "ReviewedDataset", "read_review"]
