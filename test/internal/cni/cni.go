// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

// Package cni executes a CNI plugin as a container runtime does: with environment variables, the network
// configuration on stdin, and the result or error on stdout.
package cni

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"time"
)

// Call is one execution of a plugin.
type Call struct {
	// Plugin is the path of the executable.
	Plugin string
	// Command is ADD, DEL, CHECK, STATUS, GC or VERSION.
	Command string
	// ContainerID, Netns and IfName are added to the environment if set.
	ContainerID, Netns, IfName string
	// Args is CNI_ARGS, for example "IgnoreUnknown=1;K8S_POD_NAMESPACE=demo".
	Args string
	// Path is CNI_PATH, the directories of delegated plugins.
	Path string
	// Config is the configuration of this plugin, not of a list.
	Config []byte
	// ExtraFiles are inherited from descriptor 3 on.
	ExtraFiles []*os.File
	// CPU, unless nil, receives the user and system time of the plugin and of the plugins that it executed.
	CPU *time.Duration
}

// Error is the error object of the CNI specification, section 5.
type Error struct {
	Version string `json:"cniVersion"`
	Code    uint   `json:"code"`
	Message string `json:"msg"`
	Details string `json:"details"`
}

func (e *Error) Error() string {
	return fmt.Sprintf("cni code %d: %s: %s", e.Code, e.Message, e.Details)
}

// Run executes the plugin and returns its standard output. It returns an error object of the plugin as an *Error, and
// other failures with the plugin's exit status and output.
func Run(ctx context.Context, c Call) ([]byte, error) {
	cmd := exec.CommandContext(ctx, c.Plugin)
	cmd.Env = append(os.Environ(), "CNI_COMMAND="+c.Command)
	for key, value := range map[string]string{
		"CNI_CONTAINERID": c.ContainerID,
		"CNI_NETNS":       c.Netns,
		"CNI_IFNAME":      c.IfName,
		"CNI_ARGS":        c.Args,
		"CNI_PATH":        c.Path,
	} {
		if value != "" {
			cmd.Env = append(cmd.Env, key+"="+value)
		}
	}
	cmd.Stdin = bytes.NewReader(c.Config)
	cmd.ExtraFiles = c.ExtraFiles
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	if c.CPU != nil && cmd.ProcessState != nil {
		*c.CPU = cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime()
	}
	if err == nil {
		return stdout.Bytes(), nil
	}
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		return nil, fmt.Errorf("execute %s: %w", c.Plugin, err)
	}
	var object Error
	if json.Unmarshal(stdout.Bytes(), &object) == nil && object.Code != 0 {
		return stdout.Bytes(), &object
	}
	return stdout.Bytes(), fmt.Errorf("%s %s: %w: stdout %q, stderr %q", c.Plugin, c.Command, err, stdout.String(),
		stderr.String())
}

// Addresses returns the addresses in a result of any version from 0.3.1 on.
func Addresses(result []byte) ([]netip.Addr, error) {
	var parsed struct {
		IPs []struct {
			Address string `json:"address"`
		} `json:"ips"`
	}
	if err := json.Unmarshal(result, &parsed); err != nil {
		return nil, fmt.Errorf("parse CNI result: %w", err)
	}
	var all []netip.Addr
	for _, ip := range parsed.IPs {
		prefix, err := netip.ParsePrefix(ip.Address)
		if err != nil {
			return nil, fmt.Errorf("parse CNI result: %w", err)
		}
		all = append(all, prefix.Addr())
	}
	return all, nil
}

// PluginConfig returns the first plugin's configuration from a configuration list, with the list's name and a
// version, as libcni does. extra adds keys, for example runtimeConfig or prevResult.
func PluginConfig(list []byte, version string, extra map[string]any) ([]byte, error) {
	var parsed struct {
		Name    string           `json:"name"`
		Plugins []map[string]any `json:"plugins"`
	}
	if err := json.Unmarshal(list, &parsed); err != nil {
		return nil, fmt.Errorf("parse CNI configuration list: %w", err)
	}
	if len(parsed.Plugins) == 0 {
		return nil, errors.New("parse CNI configuration list: plugins: empty")
	}
	config := parsed.Plugins[0]
	delete(config, "capabilities")
	config["name"], config["cniVersion"] = parsed.Name, version
	for key, value := range extra {
		config[key] = value
	}
	return json.Marshal(config)
}

// List returns a configuration list with another name and version.
func List(list []byte, name, version string) ([]byte, error) {
	var parsed map[string]any
	if err := json.Unmarshal(list, &parsed); err != nil {
		return nil, fmt.Errorf("parse CNI configuration list: %w", err)
	}
	parsed["name"], parsed["cniVersion"] = name, version
	return json.Marshal(parsed)
}
