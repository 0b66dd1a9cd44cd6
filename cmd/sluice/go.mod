module github.com/sluice-net/sluice/cmd/sluice

go 1.26.0
