module github.com/sluice-net/sluice/kit

go 1.26.0
