module github.com/sluice-net/sluice/model

go 1.26.0
