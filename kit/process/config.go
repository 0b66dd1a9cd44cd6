// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package process

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"time"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/health"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/log"
	"github.com/sluice-net/sluice/kit/rpc"
)

// Config contains the settings that all services share.
type Config struct {
	Log             LogConfig     `config:"log"`
	Socket          SocketConfig  `config:"socket"`
	Metrics         MetricsConfig `config:"metrics"`
	Health          HealthConfig  `config:"health"`
	Runtime         RuntimeConfig `config:"runtime"`
	ShutdownTimeout time.Duration `config:"shutdownTimeout" help:"how long running calls and background work may take to end, each"`
}

// LogConfig configures the log on stderr.
type LogConfig struct {
	Level log.Level `config:"level" help:"debug, info, warn or error"`
}

// SocketConfig configures the gRPC socket.
type SocketConfig struct {
	Path     string   `config:"path" help:"unix socket that the service answers on"`
	Group    int64    `config:"group" help:"numeric group of the socket; -1 keeps the process's own"`
	AlsoRoot []uint32 `config:"alsoRoot" help:"users that may call what only root may, for a service that does not run as root"`
}

func (c SocketConfig) listenOptions(connections int) rpc.ListenOptions {
	o := rpc.ListenOptions{MaxConns: connections}
	if c.Group >= 0 {
		gid := uint32(c.Group)
		o.GID = &gid
	}
	return o
}

// MetricsConfig configures the HTTP server for Prometheus.
type MetricsConfig struct {
	Address string `config:"address" help:"unix socket path, host:port, or off"`
	Pprof   bool   `config:"pprof" help:"also serve /debug/pprof/"`
}

// overTCP reports whether the address is a TCP address.
func (c MetricsConfig) overTCP() bool { return c.Address != "off" && !filepath.IsAbs(c.Address) }

// HealthConfig configures the HTTP server for probes of a supervisor.
type HealthConfig struct {
	Address string `config:"address" help:"loopback ip:port that answers /livez and /readyz over HTTP, or off"`
}

// off reports whether probes are disabled.
func (c HealthConfig) off() bool { return c.Address == "off" }

// RuntimeConfig tunes the Go runtime for a small resident size.
type RuntimeConfig struct {
	MemoryLimit config.ByteSize `config:"memoryLimit" help:"soft limit of the Go heap; 0 leaves it to GOMEMLIMIT"`
	GCPercent   int             `config:"gcPercent" help:"heap growth between collections; 0 leaves it to GOGC"`
}

func defaultConfig(p instance.Paths, service string) Config {
	group := int64(-1)
	if os.Geteuid() == 0 || memberOf(instance.GroupID) {
		group = int64(instance.GroupID)
	}
	return Config{
		Socket:          SocketConfig{Path: p.Socket(service), Group: group},
		Metrics:         MetricsConfig{Address: p.MetricsSocket(service)},
		Health:          HealthConfig{Address: "off"},
		Runtime:         RuntimeConfig{GCPercent: 50},
		ShutdownTimeout: 10 * time.Second,
	}
}

func memberOf(gid uint32) bool {
	groups, err := os.Getgroups()
	if err != nil {
		return false
	}
	return slices.Contains(append(groups, os.Getegid()), int(gid))
}

// Validate implements the interface of package config.
func (c *Config) Validate() error {
	var p config.Problems
	if c.ShutdownTimeout <= 0 || c.ShutdownTimeout > 10*time.Minute {
		p.Addf("shutdownTimeout", "%s is not between 1ns and 10m", c.ShutdownTimeout)
	}
	if !filepath.IsAbs(c.Socket.Path) {
		p.Addf("socket.path", "%q is not an absolute path", c.Socket.Path)
	} else if len(c.Socket.Path) > rpc.MaxPath {
		p.Addf("socket.path", "%d bytes long; at most %d fit into a unix socket address", len(c.Socket.Path), rpc.MaxPath)
	}
	if c.Socket.Group < -1 || c.Socket.Group > 1<<32-2 {
		p.Addf("socket.group", "%d is not a group number", c.Socket.Group)
	}
	for i, uid := range c.Socket.AlsoRoot {
		key := fmt.Sprintf("socket.alsoRoot[%d]", i)
		switch {
		case uid == 1<<32-1:
			p.Addf(key, "%d is not a user ID", uid)
		case uid != 0 && hasRights():
			// A caller could otherwise use the privileges of the service.
			p.Addf(key, "this service runs as root or with capabilities, and would lend them to uid %d", uid)
		}
	}
	switch a := c.Metrics.Address; {
	case a == "off":
		if c.Metrics.Pprof {
			p.Addf("metrics.pprof", "needs metrics.address, which is off")
		}
	case filepath.IsAbs(a):
		if len(a) > rpc.MaxPath {
			p.Addf("metrics.address", "%d bytes long; at most %d fit into a unix socket address", len(a), rpc.MaxPath)
		}
		if a == c.Socket.Path {
			p.Addf("metrics.address", "is the same as socket.path")
		}
	default:
		if _, _, err := net.SplitHostPort(a); err != nil {
			p.Addf("metrics.address", "%q is neither an absolute path, nor host:port, nor off", a)
		}
	}
	if !c.Health.off() {
		if err := health.CheckAddress(c.Health.Address); err != nil {
			p.Addf("health.address", "%v, nor off", err)
		}
	}
	if c.Runtime.GCPercent < 0 {
		p.Addf("runtime.gcPercent", "%d is negative", c.Runtime.GCPercent)
	}
	return p.Err()
}

func (c RuntimeConfig) apply() {
	if c.MemoryLimit > 0 {
		debug.SetMemoryLimit(int64(c.MemoryLimit))
	}
	if c.GCPercent > 0 {
		debug.SetGCPercent(c.GCPercent)
	}
}
