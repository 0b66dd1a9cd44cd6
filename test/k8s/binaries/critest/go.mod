module github.com/sluice-net/sluice/test/k8s/binaries/critest

go 1.26.6

tool sigs.k8s.io/cri-tools/cmd/critest

require sigs.k8s.io/cri-tools v1.36.0 // indirect
