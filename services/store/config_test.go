// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/kit/process"
)

func TestSettingsAreThoseOfTheDocumentation(t *testing.T) {
	want, err := process.Reference("store", func(p instance.Paths) Config {
		c := defaults(p)
		c.Node = "the host's name"
		return c
	})
	if err != nil {
		t.Fatal(err)
	}
	doc, err := os.ReadFile("../../docs/reference/store.md")
	if err != nil {
		t.Fatal(err)
	}
	// Settings that every service has are documented once, elsewhere.
	_, own, ok := strings.Cut(want, "\n| `node`")
	if own = "| `node`" + strings.TrimSpace(own); !ok || !strings.Contains(string(doc), own) {
		t.Errorf("docs/reference/store.md does not have these rows:\n%s", own)
	}
}

func TestWrongSettingsAreNamed(t *testing.T) {
	paths, err := instance.New("")
	if err != nil {
		t.Fatal(err)
	}
	for want, change := range map[string]func(*Config){
		"node: ":       func(c *Config) { c.Node = "a=b" },
		"stateDir: ":   func(c *Config) { c.StateDir = "state" },
		"etcdSocket: ": func(c *Config) { c.EtcdSocket = "/" + strings.Repeat("x", 200) },
		"address: ":    func(c *Config) { c.Address = "0.0.0.0" },
		"enrolPort: ":  func(c *Config) { c.EnrolPort = c.ClientPort },
		"quota: ":      func(c *Config) { c.Quota = 1 },
		"prefix: ":     func(c *Config) { c.Prefix = "/sluice/v1/store" },
		"address: is required in Kubernetes": func(c *Config) {
			c.Kubernetes.API = []string{"https://192.0.2.1:6443"}
		},
		"kubernetes.takeover: ": func(c *Config) {
			c.Kubernetes.API, c.Address, c.Kubernetes.Takeover = []string{"https://192.0.2.1:6443"}, "192.0.2.1", time.Second
		},
		"kubernetes.namespace: ": func(c *Config) {
			c.Kubernetes.API, c.Address, c.Kubernetes.Namespace = []string{"https://192.0.2.1:6443"}, "192.0.2.1", ""
		},
	} {
		c := defaults(paths)
		c.Node = "n1"
		if err := c.Validate(); err != nil {
			t.Fatal(err)
		}
		change(&c)
		if err := c.Validate(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want an error with %q", err, want)
		}
	}
}
