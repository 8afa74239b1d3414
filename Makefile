# Each target calls a Rust program: tests/stages or crates/lab.
STAGES = cargo run --locked -p e2e --bin stages --
# Features are unified over both packages, so that the lab shares its dependencies with the stages.
LAB = cargo build --quiet --locked -p e2e -p lab --bin lab && target/debug/lab

.PHONY: linker demo test soak bench image generate lab down shell clean

linker: # cargo needs cc to link; the stages install every other package
	@command -v cc >/dev/null || { apt-get -q update && apt-get -q install -y --no-install-recommends gcc libc6-dev; }

demo: linker ## set everything up and run the guided tour on a two-node lab
	$(STAGES) demo

test: linker ## set everything up and run all tests
	$(STAGES) test

soak: linker ## run the long variants of the tests
	$(STAGES) soak

bench: linker ## measure latency, API requests and memory
	$(STAGES) bench

image: linker ## build target/image/patchbay.tar for `ctr images import` and `docker load`
	$(STAGES) image

generate: ## generate deploy/install/ from the code
	cargo run --quiet --locked -p patchbay -- install --dir deploy/install

lab: linker ## start a two-node Kubernetes cluster without Patchbay
	$(STAGES) prepare
	$(LAB) up

down: ## stop and delete all labs
	$(LAB) down --all

shell: ## open a shell on node-1 of the lab
	$(LAB) exec node-1 -- bash

clean: down
	cargo clean
