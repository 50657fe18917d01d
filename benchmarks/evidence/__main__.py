from benchmarks.evidence.options import parse, refuse_mistakes
from utils.cli import errors_in_one_line, run_cli

if __name__ == "__main__":
    with errors_in_one_line():
        refuse_mistakes(parse(None))
    from benchmarks.evidence.cli import main  # torch takes seconds to import

    run_cli(main)
