# Small targets; what they do is written in Rust (tests/stages).
STAGES = cargo run --locked -p e2e --bin stages --
LAB = cargo run --quiet --locked -p lab --bin lab --

.PHONY: linker demo test soak bench image generate lab down shell clean

linker: # Rust links with cc; everything else is installed by the stages
	@command -v cc >/dev/null || { apt-get -q update && apt-get -q install -y --no-install-recommends gcc libc6-dev; }

demo: linker ## set everything up and walk through what Patchbay does, on a two-node lab
	$(STAGES) demo

test: linker ## set everything up and run all tests
	$(STAGES) test

soak: linker ## the long counts
	$(STAGES) soak

bench: linker ## the numbers
	$(STAGES) bench

image: linker ## target/image/patchbay.tar, for `ctr images import` and `docker load`
	$(STAGES) image

generate: ## deploy/install/ from the code
	cargo run --quiet --locked -p patchbay -- install --dir deploy/install

lab: linker ## a two-node Kubernetes, without Patchbay
	$(STAGES) prepare
	$(LAB) up

down: ## take all labs away
	$(LAB) down --all

shell: ## a shell on the lab's first node
	$(LAB) exec node-1 -- bash

clean: down
	cargo clean
