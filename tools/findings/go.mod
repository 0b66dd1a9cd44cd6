module github.com/sluice-net/sluice/tools/findings

go 1.26.0
