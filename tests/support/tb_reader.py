"""Read the event files of a run by TensorBoard's own reader."""

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def events(run_dir: Path) -> EventAccumulator:
    """Everything of one run, nothing sampled away."""
    reader = EventAccumulator(
        str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "images": 0, "tensors": 0}
    )
    reader.Reload()
    return reader


def scalars(run_dir: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value."""
    reader = events(run_dir)
    return {tag: {e.step: e.value for e in reader.Scalars(tag)} for tag in reader.Tags()["scalars"]}
