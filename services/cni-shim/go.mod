module github.com/sluice-net/sluice/services/cni-shim

go 1.26.0
