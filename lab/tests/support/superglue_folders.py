"""A tiny folder in SuperGLUE's layout: all eight tasks, every file as the benchmark has it."""

import json

PASSAGE = (
    "<b>Sent 1: </b>Ada built a small boat.<br><b>Sent 2: </b>She sailed it to Lund with Bo.<br>"
)
NEWS = (
    "Ada Berg sailed from Malmo to Lund.\n@highlight\nBo waited in Lund for the boat\n"
    "@highlight\nAda came late"
)


def boolq(i):
    return {
        "question": f"is boat {i} small",
        "passage": f"Boat {i} is {'small' if i % 2 else 'large'}.",
        "idx": i,
        "label": bool(i % 2),
    }


def cb(i):
    words = ("entailment", "contradiction", "neutral")
    return {
        "premise": f"Ada said that boat {i} sails.",
        "hypothesis": f"boat {i} {('sails', 'sinks', 'is red')[i % 3]}",
        "label": words[i % 3],
        "idx": i,
    }


def copa(i):
    return {
        "premise": "The boat sank.",
        "choice1": "It had a hole." if i % 2 == 0 else "It was painted.",
        "choice2": "It was painted." if i % 2 == 0 else "It had a hole.",
        "question": "cause",
        "label": i % 2,
        "idx": i,
    }


def multirc(i):
    def answers(*labels):
        return [{"text": f"boat {n}", "idx": n, "label": label} for n, label in enumerate(labels)]

    questions = [
        {"question": "What did Ada build?", "answers": answers(1, 0, 0), "idx": 0},
        {"question": "Where did she sail?", "answers": answers(0, 1), "idx": 1},
    ]
    return {"idx": i, "version": 1.1, "passage": {"text": PASSAGE, "questions": questions}}


def record(i):
    def entity(word, start=0):
        start = NEWS.index(word, start)
        return {"start": start, "end": start + len(word) - 1}

    def answer(word):
        return {**entity(word), "text": word}

    entities = [
        entity("Ada Berg"),
        entity("Malmo"),
        entity("Lund"),
        entity("Bo"),
        entity("Lund", 40),
    ]
    entities.append(entity("Ada", 60))
    return {
        "source": "Daily mail",
        "passage": {"text": NEWS, "entities": entities},
        "qas": [
            {
                "query": "@placeholder sailed to Lund",
                "answers": [answer("Ada Berg"), answer("Ada")],
                "idx": 2 * i,
            },
            {"query": "She left @placeholder", "answers": [answer("Malmo")], "idx": 2 * i + 1},
        ],
        "idx": i,
    }  # fmt: skip


def rte(i):
    return {
        "premise": f"Boat {i} sailed to Lund.",
        "hypothesis": f"Boat {i} {'moved' if i % 2 else 'stood still'}.",
        "label": "entailment" if i % 2 else "not_entailment",
        "idx": i,
    }


def wic(i):
    return {
        "word": "bank",
        "sentence1": "The bank of the river.",
        "sentence2": "The bank is steep." if i % 2 else "The bank is closed.",
        "idx": i,
        "label": bool(i % 2),
        "start1": 4,
        "start2": 4,
        "end1": 8,
        "end2": 8,
        "version": 1.1,
    }


def wsc(i):
    return {
        "text": "Ada gave the small boat to Bo because it leaked.",
        "target": {
            "span1_index": 2 if i % 2 else 6,
            "span1_text": "the small boat" if i % 2 else "Bo",
            "span2_index": 8,
            "span2_text": "it",
        },
        "idx": i,
        "label": bool(i % 2),
    }


MAKERS = {
    "BoolQ": boolq, "CB": cb, "COPA": copa, "MultiRC": multirc,
    "ReCoRD": record, "RTE": rte, "WiC": wic, "WSC": wsc,
}  # fmt: skip


def make(root, tasks=tuple(MAKERS), training=8, validation=6):
    """Write train.jsonl, val.jsonl and test.jsonl, the latter without labels, for each task."""
    for task in tasks:
        folder = root / task
        folder.mkdir(parents=True)
        rows = [MAKERS[task](i) for i in range(training + validation)]
        write(folder / "train.jsonl", rows[:training])
        write(folder / "val.jsonl", rows[training:])
        write(
            folder / "test.jsonl", [{k: v for k, v in row.items() if k != "label"} for row in rows]
        )
    return root


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
