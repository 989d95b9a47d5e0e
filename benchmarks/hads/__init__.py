"""The HADS study: rivals, ablations, tasks and texts, and the stages that compare them on a model.

    python -m benchmarks.hads INPUTS --out DIR          run the study (`__main__`)
    python -m benchmarks.hads.texts PACKAGES --out ...  make the study's texts

`benchmarks.hads.methods` registers the rivals with xsake's evaluation, which knows their names after the import.
"""
