"""What probes set up, run and compare: inputs, scripted drafts, cases, buffers, walks of the references."""
