"""Runs of the real trackers, each in a process of its own: they have threads and global state.

`python tracker_runs.py CLIENT FOLDER` records a small run with hostile ids, logs it with the real
client, as it starts without a server, reads it back, and prints that as JSON.
"""

import json
import os
import struct
import sys
from pathlib import Path

WORST = "microclip/worst_examples"
BROKEN = 4  # the step whose loss is not finite
HOSTILE = "<script>alert(1)</script>|{}\n*=cmd()"


def environment(folder: Path) -> dict[str, str]:
    """Return variables that keep every client inside the folder, and off the network."""
    return os.environ | {
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "TRACKIO_DIR": str(folder / "trackio"),
        "TRACKIO_AUTO_LOG_CPU": "0",
        "WANDB_MODE": "offline",
        "WANDB_ERROR_REPORTING": "false",
        "WANDB_SILENT": "true",
        "WANDB__SERVICE_WAIT": "240",  # its own 30 seconds are not enough on a busy machine
        **{f"WANDB{name}_DIR": str(folder) for name in ("", "_CACHE", "_CONFIG", "_DATA")},
    }


def main(name: str, folder: Path) -> dict:
    import microclip
    from microclip.report import RunFolder

    run = RunFolder(folder / "run")
    record(run)
    read = globals()[f"with_{name}"]
    return read(folder, run, microclip.track)


def record(run) -> None:
    """Record 30 examples of three classes for six epochs, some with a text, some with a picture."""
    import torch

    from microclip import Ledger

    generator = torch.Generator().manual_seed(0)
    with Ledger(run.ledger) as ledger:
        for step in range(12):
            rows = torch.arange(15) + 15 * (step % 2)
            logits = torch.randn(15, 3, generator=generator) * 0.3
            logits[range(15), rows % 3] += 2
            labels = (rows + (rows % 10 == 0)) % 3
            losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none")
            if step == BROKEN:
                losses[3] = torch.nan
            ids = [HOSTILE.format(i) for i in rows.tolist()]
            ledger.record(ids, losses, logits=logits, labels=labels)
    for i in range(30):
        shown = {"text": f"</td>text {i}"} if i % 20 else {"image": torch.full((4, 4), i / 30)}
        run.example(HOSTILE.format(i), **shown)


def with_wandb(folder, run, track):
    import wandb

    settings = wandb.Settings(x_disable_stats=True, x_disable_meta=True, console="off")
    with wandb.init(project="p", name="n", settings=settings) as started:
        started.log({"mine": 1.0}, step=7)  # theirs are left alone
        tracked = track(run.path, to=wandb)
        started.log({"mine": 2.0})
    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    track(run.path, to="wandb", most=0)
    assert len(list(folder.glob("wandb/offline-run-*/*.wandb"))) == 2
    history, steps_of = [], {}
    for each in wandb_records(file.read_bytes()):
        kind = each.WhichOneof("record_type")
        if kind == "history":
            row = {}
            for item in each.history.item:
                name, *inner = item.nested_key or [item.key]
                value = json.loads(item.value_json)
                row[name] = {**row.get(name, {}), inner[0]: value} if inner else value
            history.append(row)
        elif kind == "metric":
            steps_of[each.metric.name or each.metric.glob_name] = each.metric.step_metric
    # what it would upload: the table, and its pictures
    staged = {each.read_bytes() for each in (folder / "artifacts" / "staging").iterdir()}
    (table,) = (each for each in staged if each.startswith(b"{") and b"column_types" in each)
    return {
        "tracked": tracked.__dict__,
        "history": history,
        "steps_of": steps_of,
        "table": json.loads(table),
        "pictures": sum(each.startswith(b"\x89PNG") for each in staged),
    }


def wandb_records(content: bytes):
    """Yield what an offline run of wandb has written: a log in LevelDB's format."""
    from wandb.proto import wandb_internal_pb2

    at, whole = 7, b""
    while at + 7 <= len(content):
        if 2**15 - at % 2**15 < 7:  # no header fits into the rest of the block
            at += 2**15 - at % 2**15
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        whole += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # complete, or its last part
            found = wandb_internal_pb2.Record()
            found.ParseFromString(whole)
            yield found
            whole = b""


def with_trackio(folder, run, track):
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    trackio.init(project="p", name="n", embed=False)
    trackio.log({"mine": 1.0}, step=7)
    tracked = track(run.path, to=trackio)
    trackio.finish()
    assert (folder / "trackio" / "p.db").exists()
    logs = SQLiteStorage.get_logs("p", "n")
    track(run.path, to="trackio", project="q")
    assert len(SQLiteStorage.get_logs("q", "run")) == 13
    (table,) = (each[WORST]["_value"] for each in logs if WORST in each)
    pictures = [str(file.relative_to(folder)) for file in folder.rglob("trackio/media/**/*.png")]
    return {"tracked": tracked.__dict__, "logs": logs, "table": table, "pictures": pictures}


def with_mlflow(folder, run, track):
    import mlflow

    from microclip import Tracker

    experiment = mlflow.create_experiment("p", artifact_location=(folder / "artifacts").as_uri())
    with mlflow.start_run(experiment_id=experiment) as started:
        mlflow.log_metric("mine", 1.0, step=7)
        tracked = track(run.path, to=mlflow)
        Tracker(started, start=12).update(run.path)  # the same table again, in its place
    client = mlflow.MlflowClient()
    names = client.get_run(started.info.run_id).data.metrics
    history = {
        name: [(m.step, m.value) for m in client.get_metric_history(started.info.run_id, name)]
        for name in names
    }
    (table,) = (folder / "artifacts").rglob(f"{WORST}/*.json")
    loaded = client.load_table(experiment, f"{WORST}/{table.name}", [started.info.run_id])
    pictures = [str(file.relative_to(folder)) for file in folder.rglob("table_images/**/*.png")]
    track(run.path, to="mlflow", project="q", most=0)
    (named,) = mlflow.search_runs(experiment_names=["q"], output_format="list")
    assert named.info.run_name == "run"
    assert "microclip/loss" in named.data.metrics
    sys.modules["pandas"] = None  # as if it were not installed
    with mlflow.start_run(experiment_id=experiment) as second:
        track(run.path, to=second)
    (other,) = (folder / "artifacts").rglob(f"{second.info.run_id}/**/{WORST}/*.json")
    return {
        "tracked": tracked.__dict__,
        "history": history,
        "table": json.loads(table.read_text()),
        "ids": loaded["id"].to_list(),
        "pictures": pictures,
        "without_pandas": json.loads(other.read_text()),
    }


class Kept(dict):
    """A client that keeps the figures of steps."""

    def log_steps(self, steps):
        for step, figures in steps:
            assert step not in self, "logged twice"
            self[step] = figures

    def log_examples(self, step, table):
        pass


def on_a_rank(rank: int, folder: str):
    """Return what rank 0 has logged of two ranks, what a ledger says later, and when it was."""
    import torch.distributed as dist

    import microclip

    ledger = microclip.Ledger(folder)
    for step in range(5):
        ledger.record([rank, rank + 2], [step + rank, 1.0])
    live, whole, counts = Kept(), Kept(), []
    tracker = microclip.Tracker(live)
    for _ in range(2):
        dist.barrier()
        if rank == 0:
            counts.append(tracker.update(ledger).steps)
        dist.barrier()
        ledger.flush()
    if rank == 0:
        microclip.track(folder, to=whole)
    dist.barrier()
    ledger.close()
    return dict(live), dict(whole), counts


if __name__ == "__main__":
    found = main(sys.argv[1], Path(sys.argv[2]))
    print(json.dumps(found, default=str))
