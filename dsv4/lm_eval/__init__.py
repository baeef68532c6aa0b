"""dsv4 as a model of lm-evaluation-harness: `python -m dsv4.lm_eval --tasks … --model_args checkpoint=DIRECTORY`."""
