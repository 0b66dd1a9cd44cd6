module github.com/sluice-net/sluice/test

go 1.26.0
