module github.com/sluice-net/sluice/proto

go 1.26.0
