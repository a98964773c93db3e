# Short names for the scripts, which need no make. ARGS goes to the script: make test ARGS="-k plan"
.PHONY: serve test check

serve test check:
	@scripts/$@ $(ARGS)
