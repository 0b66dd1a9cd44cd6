module github.com/sluice-net/sluice/tools/testcheck

go 1.26.0
