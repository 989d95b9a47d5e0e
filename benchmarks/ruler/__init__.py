"""RULER's thirteen tasks, generated here by their published definitions, under every way of reading a prompt.

    python -m benchmarks.ruler MODEL --out FILE          run, or go on with, a comparison (`__main__`)
    python -m benchmarks.ruler.picture FILE --out PNG    needles by depth and length

The tasks and their scores are those of Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language
Models?" (2024), with its default parameters. Texts, words, questions and the wording of the prompts are ours: compare
methods with dense here, not with published scores.
"""
