module github.com/sluice-net/sluice/test/k8s

go 1.26.0

require golang.org/x/sys v0.49.0
